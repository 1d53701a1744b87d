"""The command of each study."""
