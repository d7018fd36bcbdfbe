"""What can be wrong with a configuration, one file for each subject.

A check is a function that yields one sentence for each problem (``errors.describe``). It is given
the configuration with everything filled in that could be derived, and has to bear values that
other checks refuse: it looks at sizes only after it knows that they are positive. A new check is
called in ``plans/resolve.py::problems``.
"""
