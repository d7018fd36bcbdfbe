"""The checks of a configuration, one file for each subject.

The check of one option alone stands at its field (``option.py``); ``ranges.py`` applies those. Here
are the checks of several options together, and of texts that plans read.

A check is a function that yields one sentence for each problem (``errors.describe``). It gets the
configuration with all derivable values, and must bear values that other checks refuse: it uses
sizes only after it knows that they are positive. A new check is called in
``train/setup/resolve.py::problems``.
"""
