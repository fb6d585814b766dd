"""What ranks say of themselves when something hangs or differs."""
