"""Models whose schemas describe fields by the strings below them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Documented(BaseModel):
    """The strings are read when a schema is requested. pydantic's `use_attribute_docstrings` reads them at the
    definition of the class, which takes 0.3 s of CPU time at every start of Llama Stack."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for kind in cls.__mro__:
            if issubclass(kind, Documented) and kind is not Documented:
                for name, text in _strings_below_fields(kind).items():
                    if name in properties:
                        properties[name].setdefault("description", text)
        return schema


@cache
def _strings_below_fields(model: type) -> dict[str, str]:
    try:
        source = inspect.getsource(model)
    except OSError:  # made by `create_model`, which is given the descriptions
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
    return found
