"""The command line: `atlas-hf demo | train | generate | info | export | evaluate`."""

import logging

# Where it is installed, transformers imports it through peft, and it complains of an optional package on stderr.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
