//! Samplers that own their weight.

use crate::build::{BuildError, build};
use crate::config::BackendConfig;
use core::fmt;
use flash_sampling_core::backend::Scan;
use flash_sampling_core::{
    DType, Description, Head, HeadError, Matrix, PerturbedArgmax, RowParams, SampleError, Samples, ShadowBuffer,
};

/// The owner of a head's weight, for [`build_owned`].
pub trait HeadOwner: Send + Sync {
    /// The head, which borrows from the owner.
    ///
    /// # Errors
    /// The weight does not fit the head.
    fn head(&self) -> Result<Head<'_>, HeadError>;
}

/// A dense weight `[vocab, hidden]` in owned or shared bytes: an `Arc<[u8]>`, a `Vec<u8>`, a mapped file.
pub struct OwnedWeight<B> {
    bytes: B,
    dtype: DType,
    vocab: usize,
    hidden: usize,
}

impl<B: AsRef<[u8]> + Send + Sync> OwnedWeight<B> {
    /// A weight of `vocab` rows and `hidden` columns. [`build_owned`] checks the number of bytes.
    pub fn new(bytes: B, dtype: DType, vocab: usize, hidden: usize) -> Self {
        OwnedWeight { bytes, dtype, vocab, hidden }
    }
}

impl<B: AsRef<[u8]> + Send + Sync> HeadOwner for OwnedWeight<B> {
    fn head(&self) -> Result<Head<'_>, HeadError> {
        Head::new(Matrix::from_bytes(self.bytes.as_ref(), self.dtype, self.vocab, self.hidden, self.hidden)?)
    }
}

impl<B> fmt::Debug for OwnedWeight<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OwnedWeight { dtype, vocab, hidden, .. } = self;
        write!(f, "OwnedWeight({dtype:?} [{vocab}, {hidden}])")
    }
}

/// A head, and the shadow of its weight.
struct WithShadow<'w> {
    head: Head<'w>,
    shadow: ShadowBuffer,
}

impl HeadOwner for WithShadow<'_> {
    fn head(&self) -> Result<Head<'_>, HeadError> {
        self.head.with_shadow(self.shadow.shadow())
    }
}

/// Makes the shadow of a weight `[vocab, hidden]`, with the feature `cpu` on all threads.
///
/// ```
/// use flash_sampling::{BackendConfig, Head, Matrix, RowParams, Samples, build, make_shadow};
///
/// let weight: Vec<f32> = (0..1000 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let weight = Matrix::new(&weight, 1000, 64)?; // [vocab, hidden]
///
/// // The sampler makes and owns the shadow.
/// let mut sampler = build(Head::new(weight)?, &BackendConfig { shadow: true, ..BackendConfig::default() })?;
///
/// // Or several samplers share a shadow. It must outlive them.
/// let buffer = make_shadow(&weight)?;
/// let head = Head::new(weight)?.with_shadow(buffer.shadow())?;
/// let mut other = build(head, &BackendConfig::default())?;
///
/// let (hidden, mut samples) = ([0.5f32; 64], Samples::new());
/// sampler.sample(Matrix::new(&hidden, 1, 64)?, &[RowParams::default()], &mut samples)?;
/// let token = samples.row(0)?.token();
/// other.sample(Matrix::new(&hidden, 1, 64)?, &[RowParams::default()], &mut samples)?;
/// assert_eq!(samples.row(0)?.token(), token);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`HeadError::ShadowType`] if the weight's elements are not bf16, f16 or f32.
pub fn make_shadow(weight: &Matrix<'_>) -> Result<ShadowBuffer, HeadError> {
    #[cfg(feature = "cpu")]
    return flash_sampling_cpu::make_shadow(weight, |_| ());
    #[cfg(not(feature = "cpu"))]
    ShadowBuffer::new(weight)
}

/// [`build`] for a head without a shadow. The sampler makes the shadow, and owns it.
pub(crate) fn build_with_shadow<'w>(
    head: Head<'w>,
    config: &BackendConfig,
) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
    let owner: Owner<'w> = Box::new(WithShadow { shadow: make_shadow(&head.weight())?, head });
    Ok(Box::new(Owned::try_new(owner, |owner| build(owner.head()?, config))?))
}

type Owner<'w> = Box<dyn HeadOwner + 'w>;
type Sampler<'w> = Box<dyn PerturbedArgmax + 'w>;

self_cell::self_cell!(
    struct Owned<'w> {
        owner: Owner<'w>,
        #[not_covariant]
        dependent: Sampler,
    }
);

impl PerturbedArgmax for Owned<'_> {
    fn description(&self) -> Description {
        self.with_dependent(|_, sampler| sampler.description())
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.with_dependent_mut(|_, sampler| sampler.sample(input, rows, out))
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.with_dependent_mut(|_, sampler| sampler.replan(max_rows))
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        self.with_dependent_mut(|_, sampler| sampler.scan())
    }
}

/// [`build`] for a sampler that owns its weight and borrows nothing, for example in a server.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use flash_sampling::{BackendConfig, DType, Matrix, OwnedWeight, RowParams, Samples, build_owned};
/// use std::sync::Arc;
///
/// let floats = (0..1000 * 64).map(|i| (i as f32 * 0.7).sin());
/// let bytes: Arc<[u8]> = floats.flat_map(f32::to_ne_bytes).collect();
/// let mut sampler = build_owned(OwnedWeight::new(bytes, DType::F32, 1000, 64), &BackendConfig::default())?;
/// let thread = std::thread::spawn(move || {
///     let mut samples = Samples::new();
///     let hidden = [0.5f32; 64];
///     sampler.sample(Matrix::new(&hidden, 1, 64).unwrap(), &[RowParams::default()], &mut samples).unwrap();
///     samples.row(0).unwrap().token()
/// });
/// assert!(thread.join().unwrap() < 1000);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The errors of [`build`]; [`BuildError::Head`] if the weight does not fit the head.
pub fn build_owned(
    owner: impl HeadOwner + 'static,
    config: &BackendConfig,
) -> Result<Box<dyn PerturbedArgmax>, BuildError> {
    let owned: Owned<'static> = Owned::try_new(Box::new(owner), |owner| build(owner.head()?, config))?;
    Ok(Box::new(owned))
}
