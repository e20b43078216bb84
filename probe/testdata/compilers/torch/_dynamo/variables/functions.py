class Meta(type):
    pass


class UserFunctionVariable(metaclass=Meta):
    def __init__(self, fn):
        self.fn = fn

    def get_code(self):
        return self.fn.__code__
