"""Files that torch and safetensors save and load."""
