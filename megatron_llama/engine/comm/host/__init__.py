"""Transport between hosts over gloo: direct exchanges in chunks, queues with a window, threads.
A run on GPUs uses none of it."""
