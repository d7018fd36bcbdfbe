"""Time, memory and traffic of a layout on a cluster, planned without a GPU and without torch
(``trace`` and ``calibrate`` excepted); and all pictures, charts and pages.

Read first: ``training_job.py`` (the work of a step, from the trainer's plans), ``kernels.py`` and
``simulate.py`` (the seconds of that work, and a schedule simulated with them), ``search.py``
(candidates, ranked), ``auto_parallel.py`` (the choice of one candidate for a run).

``hardware`` and ``fitted`` have the speeds of devices, ``links`` and ``steps`` the times of
messages and steps. A ``candidate`` is a configuration with its times; ``choice`` takes one for a
run. ``report`` and ``pictures.plan_page`` show the result; ``measured``, ``compare`` and
``pictures.compare_page`` compare a recorded run with it. ``run`` has the page of a run.

The room never imports ``converter``, ``tune`` or ``prove``, and the trainer reaches it through
``hooks.py`` alone."""
