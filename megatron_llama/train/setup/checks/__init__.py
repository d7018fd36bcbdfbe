"""What can be wrong with a configuration, one file for each subject.

What is true of one option alone stands at its field (``option.py``); ``ranges.py`` asks all
fields. Here are the checks of several options together, and of texts that plans have to read.

A check is a function that yields one sentence for each problem (``errors.describe``). It is given
the configuration with everything filled in that could be derived, and has to bear values that
other checks refuse: it looks at sizes only after it knows that they are positive. A new check is
called in ``train/setup/resolve.py::problems``.
"""
