"""TensorFlow's start without its chatter.

TensorFlow writes about drivers and CPU features straight to file descriptor 2 before any log level is in force. A
person who sets TF_CPP_MIN_LOG_LEVEL sees all of it.
"""

from __future__ import annotations

import os
import sys
import tempfile

__all__ = ["import_tensorflow"]


def import_tensorflow() -> None:
    """Imports TensorFlow; what it writes is shown only if it fails."""
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            import tensorflow as tf

            # Looking for devices is what it complains of most.
            tf.config.list_physical_devices()
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            # It has been read by now; child processes decide for themselves.
            del os.environ["TF_CPP_MIN_LOG_LEVEL"]
            os.dup2(kept, 2)
            os.close(kept)
