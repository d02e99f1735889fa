"""Export a network to ONNX or torch.export, to run without this package."""
