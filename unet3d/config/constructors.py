"""What a `_target_` may build: classes that compute, by the package that defines them.

None of them downloads, reads or writes files, or connects to anything when it is built;
tests/config/test_constructors.py builds each under an audit hook.
"""

from collections.abc import Mapping

Constructors = Mapping[str, frozenset[str]]
"""Package or module: names of its classes."""


def _split(names: str) -> frozenset[str]:
    return frozenset(names.split())


NETWORKS: Constructors = {
    "unet3d.model.unet": _split("UNet3D"),
    "unet3d.model.naive_unet": _split("NaiveUNet3D"),
    "unet3d.model.blocks": _split("Strided"),
    "unet3d.pool.max": _split("MaxPool3d"),
    "unet3d.pool.avg": _split("AvgPool3d"),
    "unet3d.pool.median": _split("MedianPool3d"),
    "unet3d.pool.approx_median": _split("ApproxMedianPool3d"),
    "monai.networks.nets": _split("""
        AttentionUnet BasicUNet BasicUNetPlusPlus DynUNet HighResNet MedNeXt SegResNet SegResNetDS
        SegResNetDS2 SwinUNETR UNet UNETR VNet
    """),
    "torch.nn": _split("""
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
        AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d
        BatchNorm3d CELU ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d
        ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout Dropout1d Dropout2d Dropout3d ELU
        FeatureAlphaDropout Flatten GELU GLU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh
        Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm LeakyReLU Linear
        LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d MaxPool3d Mish ModuleList PReLU
        PixelShuffle PixelUnshuffle RMSNorm RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d
        ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU
        Sigmoid Softmax Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold
        Unflatten Upsample ZeroPad1d ZeroPad2d ZeroPad3d
    """),
}
"""What a checkpoint may name: networks and their parts."""

CONFIGURED: Constructors = {
    **NETWORKS,
    "torch.nn": NETWORKS["torch.nn"]
    | _split("""
        BCELoss BCEWithLogitsLoss CosineEmbeddingLoss CrossEntropyLoss GaussianNLLLoss
        HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss MarginRankingLoss
        MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PoissonNLLLoss
        SmoothL1Loss SoftMarginLoss TripletMarginLoss
    """),
    "unet3d.loss.dice_ce": _split("DiceCE"),
    "unet3d.loss.generalized_dice": _split("GeneralizedDice"),
    "unet3d.loss.skeleton_recall": _split("SkeletonRecall"),
    "unet3d.loss.tversky": _split("Tversky"),
    "monai.losses": _split("""
        AsymmetricUnifiedFocalLoss BarlowTwinsLoss BendingEnergyLoss BoundaryLoss BoxGIoULoss
        ContrastiveLoss DiceCELoss DiceFocalLoss DiceLoss DiffusionLoss FocalLoss
        GeneralizedDiceFocalLoss GeneralizedDiceLoss GeneralizedWassersteinDiceLoss
        HausdorffDTLoss LogHausdorffDTLoss MCCLoss MaskedDiceLoss NACLLoss SSIMLoss
        SoftDiceclDiceLoss SoftclDiceLoss TverskyLoss
    """),
    "unet3d.metric.calibration": _split("CalibrationError"),
    "unet3d.metric.centerline_dice": _split("CenterlineDice"),
    "unet3d.metric.lesion_scores": _split("LesionScores"),
    "unet3d.metric.volume_error": _split("VolumeError"),
    "unet3d.checkpointing.offload": _split("OffloadActivations"),
    "unet3d.checkpointing.per_level": _split("PerLevelStrategy"),
    "unet3d.checkpointing.plain": _split("PlainModules"),
    "unet3d.checkpointing.recompute": _split("RecomputeBlocks"),
    "unet3d.data.augmentation.pipeline": _split("Augment"),
    "unet3d.data.layouts.decathlon": _split("Decathlon"),
    "unet3d.data.layouts.nnunet": _split("NnUnet"),
    "unet3d.data.layouts.pairs": _split("Pairs"),
    "unet3d.data.layouts.synthetic": _split("Synthetic"),
    "unet3d.data.layouts.synthetic_hard": _split("SyntheticHard"),
    "torch.optim": _split("""
        ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD
    """),
    "torch.optim.lr_scheduler": _split("""
        ConstantLR CosineAnnealingLR CosineAnnealingWarmRestarts CyclicLR ExponentialLR LinearLR
        MultiStepLR OneCycleLR PolynomialLR ReduceLROnPlateau StepLR
    """),
    "unet3d.lit.lr_schedule": _split("Constant Cosine Poly ReduceOnPlateau"),
    "unet3d.lit.callbacks.checkpoints": _split("BestCheckpoint"),
    "unet3d.lit.callbacks.early_stopping": _split("EarlyStopping"),
    "unet3d.lit.callbacks.images": _split("CaseImages"),
    "lightning.pytorch.callbacks": _split("""
        DeviceStatsMonitor EarlyStopping GradientAccumulationScheduler LearningRateMonitor
        ModelSummary RichModelSummary Timer
    """),
    "unet3d.lit.loggers.csv": _split("CsvLogger"),
    "unet3d.lit.loggers.mlflow": _split("RunMlflowLogger"),
    "unet3d.lit.loggers.tensorboard": _split("FaultTolerantTensorBoardLogger"),
    "unet3d.lit.loggers.wandb": _split("RunWandbLogger"),
    "lightning.pytorch.loggers": _split("CSVLogger TensorBoardLogger"),
}
"""What a config may name."""

TRAINER: Constructors = {"lightning.pytorch": _split("Trainer")}
"""What the key `trainer` may name, and nothing in it: a Trainer starts processes."""
