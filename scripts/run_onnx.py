"""Run an exported network without this package: python scripts/run_onnx.py net.onnx volume.npy"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}
image = np.load(sys.argv[2]).astype(np.float32)  # (C, D, H, W), turned to facts["orientation"]
assert set(facts["normalize"]) == {"zscore"}, f"normalise by {facts['normalize']} instead"
image -= image.mean((1, 2, 3), keepdims=True)
image /= image.std((1, 2, 3), keepdims=True)
d, h, w = facts["patch_size"]  # of a larger volume: one window after the other
logits = np.asarray(session.run(["logits"], {"image": image[None, :, :d, :h, :w]})[0])
overlapping = facts["activation"] == "sigmoid"  # each voxel in any number of them, or in one
found = logits > 0 if overlapping else logits == logits.max(1, keepdims=True)  # (1, K, D, H, W)
for name, mask in zip(facts["outputs"], found[0], strict=True):
    print(name, int(mask.sum()))
