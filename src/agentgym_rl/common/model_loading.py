"""A lock around transformers' `from_pretrained`.

While it loads, `from_pretrained` replaces `PreTrainedModel.tie_weights` for the whole process. Two threads that load at
the same time can leave the replacement in place, and later models silently have untied weights.
"""

from __future__ import annotations

import threading

loading_lock = threading.Lock()
"""Hold it while a model is loaded."""
