"""What tests share: devices, and the checks of the source tree."""
