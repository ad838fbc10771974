"""What can be known of the kernels without a GPU: faithful interpretation, an access sanitiser, offline compilation."""
