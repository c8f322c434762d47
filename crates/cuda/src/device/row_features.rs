//! What a caller says of kernels and rows, as far as it decides which kernel draws.

/// Which kernels draw. All give the same bits, but for types that tensor cores do not take, whose sums are rounded
/// otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelChoice {
    /// The fastest that takes the GPU and the layout: the Hopper kernel, else the portable one.
    #[default]
    Fastest,
    /// The portable kernel: `mma.sync` and `cp.async`.
    Portable,
    /// The portable kernel, which reads every layout as if nothing were aligned. Slow; made for tests.
    PortableUnaligned,
}

/// What the rows of a launch may have. A promise of less lets a faster kernel draw on Hopper; the draws are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowFeatures {
    /// Anything.
    #[default]
    Any,
    /// Everything but penalties: no row is [`PENALISED`](crate::abi::PENALISED). Masks that forbid most tokens are slow.
    Unpenalised,
    /// Neither masks, biases nor penalties.
    Bare,
}
