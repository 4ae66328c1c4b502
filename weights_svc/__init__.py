"""weights_svc: keeps weight versions, whole and verified, and hands them out."""
