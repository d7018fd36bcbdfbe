"""The processes of a run: their ranks, how they find each other, and what happens when one dies.

Reading order: ``launcher.py`` (the variables of torchrun and Slurm), ``join.py`` (from there to the
group of all ranks), ``mesh.py`` (the axes of a layout), ``watch.py`` (ranks that die or hang),
``hang_report.py`` (sentences about them), ``keeper.py`` (ranks that begin again in their job).

The room never imports data, checkpoints or the trainer."""
