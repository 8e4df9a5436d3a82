"""The only code that knows ioctl numbers, /proc and /sys. Standard library only."""
