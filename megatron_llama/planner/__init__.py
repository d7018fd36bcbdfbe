"""What a cluster would do with a layout: time, memory and traffic, without a GPU and without torch
(``trace`` and ``calibrate`` excepted); and every picture, chart and page.

Read first: ``training_job.py`` (the work of a step, from the trainer's plans), ``kernels.py`` and
``simulate.py`` (that work as seconds, and a schedule walked with them), ``search.py`` (candidates,
ranked), ``auto_parallel.py`` (one of them for a run).

``hardware`` and ``fitted`` say how fast devices are, ``links`` and ``steps`` what messages take. A
``candidate`` is a configuration with its times, ``choice`` takes one for a run. ``report`` and
``pictures.plan_page`` show the result; ``measured``, ``compare`` and ``pictures.compare_page`` hold
a recorded run against it. ``run`` has the page of a run.

The room never imports ``converter``, ``tune`` or ``prove``, and the trainer reaches it through
``hooks.py`` alone."""
