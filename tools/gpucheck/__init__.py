"""What ``tools/gpu_check.sh`` runs."""
