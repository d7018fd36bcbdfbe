"""Meta's own files: consolidated.NN.pth and params.json."""
