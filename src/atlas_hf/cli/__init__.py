"""The command line: `atlas-hf demo | train | generate | info | export | evaluate`."""
