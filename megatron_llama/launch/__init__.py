"""The processes of a run: who they are, how they find each other, and what happens when one dies.

In the order in which to read: ``launcher.py`` (what torchrun and Slurm say), ``join.py`` (from
there to the group of all ranks), ``mesh.py`` (the axes of a layout), ``watch.py`` (ranks that die
or hang), ``hang_report.py`` (what is said of them).

The room never imports data, checkpoints or the trainer."""
