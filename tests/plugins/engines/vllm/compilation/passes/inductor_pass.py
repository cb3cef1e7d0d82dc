class InductorPass:
    def uuid(self):
        return type(self).__name__

    def is_applicable_for_range(self, compile_range):
        return True
