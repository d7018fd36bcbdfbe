"""ZenFlow: the columns with the largest gradients on the device, all others on the host."""
