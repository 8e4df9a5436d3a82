"""Runs once, before the parent is captured: whatever is loaded here, no child loads again."""

import decimal
import json
import math
import random
import statistics
import uuid

import numpy as np

# Importing alone leaves much to the first call: BLAS and LAPACK set up their buffers then,
# and each of these modules imports its own compiled parts.
square = np.random.default_rng(0).random((32, 32))
np.linalg.svd(square @ square.T)
np.linalg.inv(square + 32 * np.eye(32))
np.fft.rfft(square[0])
np.sort(square, axis=0).mean(axis=1).round(3).tolist()
np.random.rand(3)  # the global generator too; every child reseeds it when it wakes
repr(square), str(square)

json.loads(json.dumps({"warm": [1, 2.5, None, "text"]}))
uuid.uuid4()
random.random()
math.sqrt(statistics.fmean([1.0, 2.0]))
decimal.Decimal("1.5") + 1
