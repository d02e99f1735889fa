"""The logger of TensorBoard."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.lit.loggers.run_logger import RunFacts
from unet3d.lit.loggers.tensorboard import FaultTolerantTensorBoardLogger


def test_the_config_is_shown_as_code_whatever_it_holds(tmp_path):
    logger = FaultTolerantTensorBoardLogger(tmp_path, name="", version="")
    config = "a: 'x\n\n```\n\n![y](http://z)'\n"
    logger.start(RunFacts(config=config, choices={}, final_metrics=(), device="cpu"), 0)
    logger.close(finished=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("config/text_summary")
    (text,) = event.tensor_proto.string_val
    assert all(not line or line.startswith("    ") for line in text.decode().splitlines())
