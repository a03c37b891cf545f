"""SGLang servers of this host: found, described, stopped and started by one journalled job."""
