"""Run an exported network without this package: python scripts/run_onnx.py net.onnx volume.npy"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
metadata = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
image = np.load(sys.argv[2]).astype(np.float32)  # (C, D, H, W) in metadata["orientation"]
assert set(metadata["normalize"]) == {"zscore"}, f"normalize with {metadata['normalize']} instead"
image -= image.mean((1, 2, 3), keepdims=True)
image /= image.std((1, 2, 3), keepdims=True)
d, h, w = metadata["patch_size"]  # larger volumes need a sliding window
logits = np.asarray(session.run(["logits"], {"image": image[None, :, :d, :h, :w]})[0])
regions = metadata["activation"] == "sigmoid"  # regions may overlap, classes exclude each other
masks = logits > 0 if regions else logits == logits.max(1, keepdims=True)  # (1, K, D, H, W)
for name, mask in zip(metadata["outputs"], masks[0], strict=True):
    print(name, int(mask.sum()))
