//! The implementation of public samplers that wrap a [`HeadSampler`](crate::sampler::head_sampler::HeadSampler).

/// Implements a public sampler for a tuple struct around a
/// [`HeadSampler`](crate::sampler::head_sampler::HeadSampler).
macro_rules! impl_sampler {
    ($sampler:ident $(, $($more:item)*)?) => {
        impl flash_sampling_core::PerturbedArgmax for $sampler<'_> {
            fn description(&self) -> flash_sampling_core::Description {
                self.0.description.clone()
            }

            fn sample(
                &mut self,
                input: flash_sampling_core::Matrix<'_>,
                rows: &[flash_sampling_core::RowParams<'_>],
                out: &mut flash_sampling_core::Samples,
            ) -> Result<(), flash_sampling_core::SampleError> {
                self.0.sample(input, rows, out)
            }

            fn replan(&mut self, max_rows: usize) -> Result<(), flash_sampling_core::SampleError> {
                self.0.replan(max_rows)
            }

            $($($more)*)?
        }
    };
}
pub(crate) use impl_sampler;
