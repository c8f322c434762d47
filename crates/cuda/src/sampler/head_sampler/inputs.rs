//! The memory for the inputs of launches, and their copies to the GPU.

use super::hidden_states::HiddenStates;
use super::kernels::HeadKernels;
use super::uploaded_weight::row_stride;
use crate::abi::{DeviceAddress, Row};
use crate::device::{DeviceMatrix, Pinned, Queue, Scratch};
use crate::error::CudaError;
use crate::sampler::Staging;
use cudarc::driver::CudaStream;
use flash_sampling_core::DType;

/// Bytes of the inputs of a launch without lists, with hidden states of this many bytes.
pub(super) fn staged_bytes(max_draws: usize, hidden: usize) -> usize {
    max_draws * (hidden + size_of::<Row>()) + 16
}

impl HeadKernels {
    /// Hidden states that were copied to an address.
    pub(super) fn copied(&self, address: DeviceAddress<u8>, dtype: DType, rows: usize) -> DeviceMatrix {
        let cols = self.head.weight.cols;
        DeviceMatrix { address, dtype, rows, cols, row_stride: row_stride(cols) }
    }

    /// Allocates room for inputs: page-locked bytes, and bytes on the GPU.
    fn reserve(&mut self, staged: usize, inputs: usize, queue: Queue<'_>) -> Result<(), CudaError> {
        if staged > self.staged.len() {
            self.staged = Pinned::new(staged.next_power_of_two(), queue.stream())?;
        }
        if inputs > self.inputs.len() {
            self.inputs = Scratch::new(inputs.next_power_of_two(), &[], &self.device)?;
        }
        Ok(())
    }

    /// Allocates room for the inputs of calls with hidden states on the host and this many bytes of lists and masks.
    pub(super) fn reserve_lists(&mut self, bytes: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let size =
            staged_bytes(self.max_draws, row_stride(self.head.weight.cols) * size_of::<f32>()).max(self.staged.len());
        self.reserve(size, size.next_power_of_two() + bytes, HeadKernels::queue(stream))
    }

    /// Copies the staged inputs to the GPU. Returns the hidden states and the address of the rows.
    pub(super) fn copy(
        &mut self,
        queue: Queue<'_>,
        staging: &mut Staging,
        hidden: HiddenStates<'_>,
    ) -> Result<(DeviceMatrix, DeviceAddress<Row>), CudaError> {
        let input = if let HiddenStates::Host(input) = hidden { Some(input) } else { None };
        staging.take_hidden(input);
        let size = staging.lists_at();
        self.reserve(size, staging.len(), queue)?;
        let base = self.inputs.begin_use();
        staging.finish_rows(input, base, &mut self.staged.bytes()?[..size]);
        self.staged.copy_up(base, size, queue)?;
        staging.lists().copy_up(base.add(size), queue)?;
        let rows = base.add(staging.rows_at()).cast();
        Ok(match hidden {
            HiddenStates::Host(input) => (self.copied(base, input.dtype(), staging.rows()), rows),
            HiddenStates::Device(hidden) => (hidden, rows),
        })
    }
}
