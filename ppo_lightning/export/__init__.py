"""Export of trained agents: ONNX files and folders for the Hugging Face Hub."""
