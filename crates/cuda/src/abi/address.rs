//! Typed addresses in device memory.

use bytemuck::{Pod, Zeroable};
use core::fmt;
use core::marker::PhantomData;
use cudarc::driver::{CudaStream, DevicePtr};

/// A device address of one or more values of type `T`, 64 bits wide; 0 = none.
///
/// Matrices whose element type is known only at run time have addresses of `u8`.
#[repr(transparent)]
#[derive(Zeroable, Pod)]
pub struct DeviceAddress<T> {
    address: u64,
    pointee: PhantomData<T>,
}

impl<T> DeviceAddress<T> {
    /// The null address.
    pub const NULL: Self = DeviceAddress::new(0);

    /// Creates an address from the driver's number.
    pub const fn new(address: u64) -> Self {
        DeviceAddress { address, pointee: PhantomData }
    }

    /// Returns the address of an allocation, for work on `stream`.
    pub fn of(memory: &impl DevicePtr<T>, stream: &CudaStream) -> Self {
        DeviceAddress::new(memory.device_ptr(stream).0)
    }

    /// Returns the address as a number.
    pub const fn get(self) -> u64 {
        self.address
    }

    /// Whether the address is null.
    pub const fn is_null(self) -> bool {
        self.address == 0
    }

    /// Returns the address `count` values further.
    pub const fn add(self, count: usize) -> Self {
        DeviceAddress::new(self.address + (count * size_of::<T>()) as u64)
    }

    /// Returns the same address for values of another type.
    pub const fn cast<U>(self) -> DeviceAddress<U> {
        DeviceAddress::new(self.address)
    }

    /// Whether the address is a multiple of the alignment of `T`.
    pub(crate) const fn is_aligned(self) -> bool {
        self.address.is_multiple_of(align_of::<T>() as u64)
    }
}

impl<T> Clone for DeviceAddress<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceAddress<T> {}

impl<T> Default for DeviceAddress<T> {
    fn default() -> Self {
        DeviceAddress::NULL
    }
}

impl<T> PartialEq for DeviceAddress<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl<T> Eq for DeviceAddress<T> {}

impl<T> fmt::Debug for DeviceAddress<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}
