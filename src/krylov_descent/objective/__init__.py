"""The objective: the mean loss over samples plus L2, its values and its gradients."""
