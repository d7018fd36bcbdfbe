"""What a cluster would do with a layout: time, memory and traffic, without a GPU. Standard library
only.

``hardware`` has what data sheets say and ``fitted`` what published runs taught; ``job`` the work of
a step in integers, read from the plans of the trainer; ``kernels``, ``links`` and ``steps`` turn it
into seconds, ``simulate`` replays a schedule with them, ``own`` is a configuration of this trainer,
``search`` tries layouts and ``report`` prints them. ``measured`` reads a recorded run, ``compare``
holds it against its plan, ``picture`` draws both. Runs of other trainers come in through
``published`` and ``footprint``; ``score`` and ``judge`` say how good all this is.
"""
