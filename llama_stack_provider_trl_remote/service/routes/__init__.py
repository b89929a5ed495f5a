"""The HTTP routes; each declares who may call it (`security.access.Access`)."""
