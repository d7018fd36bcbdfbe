"""What a run reports: FLOPs and MFU, the averages of a log interval, the log lines and
``log.jsonl``."""
