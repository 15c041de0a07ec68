"""The PEFT side: configs, layers, the tuner, files, and facts of the base model."""
