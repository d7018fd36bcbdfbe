#!/bin/sh
# Stands for Python: writes its arguments, one a line.
printf "%s\n" "$@"
