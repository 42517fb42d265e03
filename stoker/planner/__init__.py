"""Which layouts of ranks a model can have on given GPUs, with memory and estimated speed, from config.json alone."""
