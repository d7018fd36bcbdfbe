"""One module for each command. They import what is heavy when they run, so that ``--help`` appears
at once."""
