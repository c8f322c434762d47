//! The caller's description of kernels and rows, which selects the kernel of a launch.

/// The kernels that draw. All kernels give the same bits, except for types that tensor cores do not support, whose sums
/// are rounded differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelChoice {
    /// The fastest kernel for the GPU and the layout: the Hopper kernel, else the portable kernel.
    #[default]
    Fastest,
    /// The portable kernel: `mma.sync` and `cp.async`.
    Portable,
    /// The portable kernel, which reads every layout as unaligned. Slow; for tests.
    PortableUnaligned,
}

/// The features that the rows of a launch may have. Fewer features allow a faster Hopper kernel with the same draws.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowFeatures {
    /// All features.
    #[default]
    Any,
    /// All but penalties: no row is [`PENALISED`](crate::abi::PENALISED). Masks that forbid most tokens are slow.
    Unpenalised,
    /// Neither masks, biases nor penalties.
    Bare,
}
