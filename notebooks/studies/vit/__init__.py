"""The study of vision transformers fine-tuned on few digits.

The middle radii of zoo.yaml are round numbers at which the median rise of the loss over three models outside the zoo
lay between 0.1 and 0.3 nats (published grids for vision transformers: 0.025 to 0.2 Euclidean, 0.5 to 4 adaptive); the
others are a factor of 4 to either side, where the rise is far below and far above what a Taylor series reaches. All was
fixed before any correlation was looked at.
"""

from __future__ import annotations

from studies.zoos.page import ZooPage

VIT = ZooPage(
    key="vit",
    title="Vision transformers fine-tuned on few digits",
    zoo=(
        "Three vision transformers (3 layers, 4 heads of 12, 58,570 parameters) are pre-trained on 500 of "
        "scikit-learn’s digits: turned by 90°, inverted, or with two digits to a class. Each model begins from one of "
        "them with a new classifier and is fine-tuned on 256 other digits, shifted by up to a pixel and with noise of "
        "0.3 standard deviations; 1041 more, disturbed alike, test it. At random: learning rate (6e-4 to 6e-3), weight "
        "decay (1e-4 to 1), batch size (16, 32, 64), label smoothing (0, 0.1), augmentation by further shifts (with, "
        "without), steps (400, 600) and seed. Sharpness is measured on the 256 training images, in 2 batches of 128."
    ),
    given={"learning_rate": "learning rate", "start": "start"},
)
