"""The engine process: a mailbox in front of one Engine. Only this package joins the engine with proto and xgrammar."""
