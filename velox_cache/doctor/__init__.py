"""What an installation is, whether its kernels are right, and how fast it is: one report to attach to an issue."""
