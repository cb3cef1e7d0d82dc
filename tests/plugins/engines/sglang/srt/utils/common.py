def is_cuda():
    return True
