"""What a cluster would do with a layout: time, memory and traffic, without a GPU and without torch
(``trace`` and ``calibrate`` excepted).

``training_job`` reads the work of a step from the trainer's plans, ``hardware`` and ``fitted`` say
how fast devices are. ``kernels``, ``links`` and ``steps`` turn both into seconds, ``simulate``
walks a schedule with them. A ``candidate`` is a configuration with its times, ``search`` ranks
candidates and ``choice`` takes one for a run. ``report`` and ``picture_plan`` show the result;
``measured``, ``compare`` and ``picture_compare`` hold a recorded run against it.
"""
