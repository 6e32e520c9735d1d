"""Convolutions in groups: their channels as an axis of groups and one of a group's channels.

TVM writes one axis for all output channels, whose group says which input channels are summed.
Several groups can be taken as one, with zeros for weights that would lead from one of them to
another: tensor cores multiply 16 channels at least, and a group may have fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tunerd.candidates.nests.nest import Axis, Expr, Nest, NotANest, axis_expr, linear, number


@dataclass(frozen=True)
class Grouping:
    """A nest that sums over the input channels of a group, and over taps."""

    nest: Nest
    image: Expr  # reads the channels of `group`
    weights: Expr
    channels: Axis  # of the result
    group: Axis

    @staticmethod
    def of(nest: Nest) -> Grouping:
        """Find the groups of a nest; raises NotANest with the reason where it has none."""
        value = nest.reduction.value
        while value.op == "cast":
            (value,) = value.args
        if value.op != "mul" or not nest.axes or not nest.reduction.axes:
            raise NotANest("it is no sum of products")
        for channels in reversed(nest.axes):
            for image, weights in (value.args, value.args[::-1]):
                found = _by_group(image, channels)
                if found is None or channels not in weights.axes:
                    continue
                group, image = found
                return Grouping(nest, image, weights, channels, group)
        raise NotANest("it has no groups of channels")

    @property
    def outputs(self) -> int:
        """How many output channels a group has."""
        return self.channels.extent // self.group.extent

    @property
    def channel(self) -> Axis:
        """The axis of the sum that goes over the input channels of a group."""
        return self.nest.reduction.axes[-1]

    def together(self, count: int) -> Nest:
        """Return the nest with `count` groups taken as one.

        Instead of the channels it has an axis of these, and one of their output channels; its sum
        goes over all of their input channels. Where `count` does not divide the groups, the second
        axis goes beyond the result's channels in the end, and what it has there is to be left out.
        Raises NotANest where channels of several groups do not lie together.
        """
        taken = Axis("groups", -(-self.group.extent // count))
        member = Axis("member", count * self.outputs)
        deep = Axis(self.channel.name, count * self.channel.extent)
        places = {
            axis_expr(self.channels): _sum(
                _times(axis_expr(taken), member.extent), axis_expr(member)
            )
        }
        parts = {self.channels: (taken, member) if taken.extent > 1 else (member,)}
        image, weights = self.image, self.weights
        if count == 1:
            image = _swapped(image, {axis_expr(self.group): axis_expr(taken)})
            weights = _swapped(weights, places)
        else:
            image = self._read_together(taken, deep, count)
            weights = self._block_diagonal(member, deep, places)
        *taps, _ = self.nest.reduction.axes
        product = Expr("mul", (image, weights), dtype=image.dtype)
        reduction = replace(self.nest.reduction, axes=(*taps, deep), value=product)
        return replace(
            self.nest,
            axes=tuple(own for axis in self.nest.axes for own in parts.get(axis, (axis,))),
            target=_swapped(self.nest.target, places),
            epilogue=_swapped(self.nest.epilogue, places),
            reductions=(reduction,),
        )

    def _read_together(self, taken: Axis, deep: Axis, count: int) -> Expr:
        """Return the image as it is read at the channels of several groups; zero beyond the last.

        Channel k % depth of group (count * taken + k // depth) is channel k of the first one.
        """
        if self.channels != self.nest.axes[-1]:
            raise NotANest("the output channels of several groups do not lie together")
        own = {self.group, self.channel}
        loads = {e for e in self.image.walk() if e.op == "load"}
        if len(loads) != 1:
            raise NotANest("an operand is no single tensor")
        (load,) = loads
        place = linear(load.args[0])
        elsewhere = _swapped(self.image, {load: number(0)})
        if place is None or own & elsewhere.axes:
            raise NotANest("a group's channels are not read by steps of equal size")
        step = place.factors.get(self.channel, 0)
        if place.factors.get(self.group, 0) != step * self.channel.extent:
            raise NotANest("the input channels of several groups do not lie together")
        first = {
            axis_expr(self.group): _times(axis_expr(taken), count),
            axis_expr(self.channel): axis_expr(deep),
        }
        image = _swapped(self.image, first)
        if self.group.extent % count == 0:
            return image
        at = _sum(_times(axis_expr(taken), deep.extent), axis_expr(deep))
        return _where(_is("lt", at, number(self.group.extent * self.channel.extent)), image)

    def _block_diagonal(self, member: Axis, deep: Axis, places: Mapping[Expr, Expr]) -> Expr:
        """Return weights from each group to itself, and zeros."""
        depth = number(self.channel.extent)
        within = Expr("floormod", (axis_expr(deep), depth), dtype="int64")
        weights = _swapped(self.weights, {**places, axis_expr(self.channel): within})
        of_input = Expr("floordiv", (axis_expr(deep), depth), dtype="int64")
        of_output = Expr("floordiv", (axis_expr(member), number(self.outputs)), dtype="int64")
        return _where(_is("eq", of_input, of_output), weights)


def _by_group(image: Expr, channels: Axis) -> tuple[Axis, Expr] | None:
    """Return groups of channels and what reads by them alone; None where it reads otherwise."""
    for part in image.walk():
        if part.op == "floordiv" and part.args[0] == axis_expr(channels):
            size = part.args[1].value
            if not isinstance(size, int) or channels.extent % size:
                return None
            group = Axis("group", channels.extent // size)
            by_group = _swapped(image, {part: axis_expr(group)})
            return None if channels in by_group.axes else (group, by_group)
    return None


def _swapped(expr: Expr, parts: Mapping[Expr, Expr]) -> Expr:
    """Return an expression with others in the place of some of its parts."""
    if expr in parts:
        return parts[expr]
    return replace(expr, args=tuple(_swapped(a, parts) for a in expr.args))


def _where(condition: Expr, expr: Expr) -> Expr:
    """Return an expression that is zero elsewhere, and reads nothing there."""
    zero = Expr("const", value=0.0, dtype=expr.dtype)
    if expr.op == "select" and expr.args[2].op == "const" and expr.args[2].value == 0:
        test, expr, _ = expr.args
        condition = Expr("and", (condition, test), dtype="bool")
    return Expr("select", (condition, expr, zero), dtype=expr.dtype)


def _is(op: str, a: Expr, b: Expr) -> Expr:
    return Expr(op, (a, b), dtype="bool")


def _sum(a: Expr, b: Expr) -> Expr:
    return Expr("add", (a, b), dtype="int64")


def _times(a: Expr, factor: int) -> Expr:
    return Expr("mul", (a, number(factor)), dtype="int64")
