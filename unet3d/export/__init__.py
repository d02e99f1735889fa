"""A network as a file that other programs run: ONNX, or torch.export's, without this package."""
