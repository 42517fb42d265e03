"""The fuzz targets, one file each. A file defines `TARGET`; its name is the target's name."""
