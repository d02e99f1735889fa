"""Synthetic reports of runs."""


def make_report(dice, mib, seconds, *, pool="max", finished=True, evaluated=True, **config):
    content = {
        "finished": finished,
        "steps": 10,
        "parameters": 1234,
        "choices": {"pool": pool, "model": "unet_tiny"},
        "config": {"pool": {"_target_": f"pool.{pool}"}, "model": {"depth": 3}, **config},
        "metrics": {"val/dice": dice, "val/dice/a": dice, "val/hd95_mm": 2.0},
        "memory": {"first_step": {"resident": 1}, "steady_step": {"resident": int(mib * 2**20)}},
        "speed": {"median_step_seconds": seconds},
    }
    if evaluated:
        score = {"mean": dice, "low": dice - 0.1, "high": dice + 0.1}
        scores = {"dice": score, "hd95_mm": {"mean": 1.5, "low": 1, "high": 2}}
        content["evaluation"] = {"best_of": 5, "mean": scores, "per_class": {"a": scores}}
    return content
